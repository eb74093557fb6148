"""A page on Dask's dashboard: what goes by handle between workers, live.

It is brought by `dask_gpuipc.register` or a scheduler preload, both explicit, and stays as long as
the scheduler runs. All that it shows comes with the workers' heartbeats; it asks nobody.

- `feed` makes a `Report` of the heartbeats;
- `components` draws parts of it, each a component as Dask's own;
- `page` puts them on the dashboard of one scheduler;
- `plugin` is the scheduler plugin that does so.

`components` and `page` need bokeh; the rest can be imported without it.
"""

from __future__ import annotations
