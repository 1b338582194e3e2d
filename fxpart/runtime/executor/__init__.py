"""The interpreter of a rank's actions."""
