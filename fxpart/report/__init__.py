"""Reports of a plan: text, tables, HTML, traces. Plain Python, no torch; nothing here prints."""
