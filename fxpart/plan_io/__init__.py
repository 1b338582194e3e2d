"""Plans in and out: files, migration, checks, schema, comparison. No torch."""
