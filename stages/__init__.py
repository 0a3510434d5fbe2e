"""One entry point a DVC stage."""

import rlhf  # noqa: F401  (before torch: it sets what torch reads when it is loaded)
