"""Pictures of a report as SVG: grids, memory, planes, timelines, rooflines."""
