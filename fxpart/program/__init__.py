"""What compile time and the runtime share of a program, as plain data."""
