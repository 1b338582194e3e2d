"""Clusters in and out: files, presets, detection, checks, link look-up."""
