"""Program descriptions shared by the compiler and the runtime, as plain data."""
