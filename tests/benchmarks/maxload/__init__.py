"""The max-load problem: graphs that others have priced, split over accelerators and CPU cores."""
