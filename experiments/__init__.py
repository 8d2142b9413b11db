"""Experiments: flags -> frozen config -> runner -> files -> figures."""

import os

# One thread for LAPACK, set before NumPy and SciPy are imported. Its threads spin
# while they wait: on a busy machine a Cholesky factor of size 300 takes 30 times
# longer with two threads than with one. It also keeps the last digits of a run
# independent of the number of cores. XLA's own threads are not concerned.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# One CPU device a core, so that seeds run side by side (see msb_jax/parallel.py), and
# one thread in each: products that wait for threads of the same pool can lock up.
for _flag in (
    f"--xla_force_host_platform_device_count={os.cpu_count() or 1}",
    "--xla_cpu_multi_thread_eigen=false",
):
    _given = os.environ.get("XLA_FLAGS", "")
    if _flag.split("=")[0] not in _given:
        os.environ["XLA_FLAGS"] = f"{_given} {_flag}".strip()
