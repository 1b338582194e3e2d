"""Families of plans: each proposes candidates of one kind."""
