"""Drivers of optical circuit switches that `fabric.driver` names; each is a function `driver(section)` that gives an OcsDriver."""
