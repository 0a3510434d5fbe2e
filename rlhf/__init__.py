"""The library. What the numerical libraries read when they are loaded is set here, before any of them is."""

import os

# Threads that wait sleep rather than spin: beside other work on the same cores, spinning made a step six times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# cuBLAS is reproducible only with a fixed workspace.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Else torch's store warns of hosts without a name, and each rank of a choice that replicas.py makes on purpose.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
