"""Changed and hostile files for every reader; readers.py is the table."""
