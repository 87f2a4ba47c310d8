"""Bundled environments: a player that speaks ML-Agents' protocol, and its scenes."""

SCENES = ("3DBall", "Crawler", "Mixed")
"""ids of the bundled scenes"""
