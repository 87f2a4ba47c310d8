"""Bundled environments: a player that speaks ML-Agents' protocol, and its scenes."""

SCENES = ("3DBall", "Crawler", "Mixed")
"""ids of the bundled scenes"""


def cheap(model):
    """A MuJoCo model without shadows, multisampling and reflections, before its first picture: without a GPU they take nearly all of the time."""
    model.vis.quality.shadowsize = model.vis.quality.offsamples = 0
    model.mat_reflectance[:] = 0
