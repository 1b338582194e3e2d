"""Trainers from programs: the factory and evaluation."""
