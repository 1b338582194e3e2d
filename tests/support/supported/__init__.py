"""What training supports and refuses, as a table of programs that the tests run."""
