"""The figures that the paper prints, as they stand there.

Keys of every table are (row, column), spelled as the plan spells them. The slaves of
the ablation have numbers only; they are taken in the order of the paper's sections.
Figures are pictures in the paper, so that curves have nothing to stand beside.
"""

from __future__ import annotations

from collections.abc import Mapping

Printed = Mapping[tuple[str, str], float]

FORMS = ("linear", "quadratic", "cubic", "mixed")
LOGS = ("delicious", "lastfm", "movielens", "yahoo")
LAMBDAS = ("0.1", "0.5", "1", "5", "10", "50")


def _read(columns: tuple[str, ...], text: str) -> Printed:
    rows = [line.split() for line in text.strip().splitlines()]
    return {
        (row, column): float(value)
        for row, *values in rows
        for column, value in zip(columns, values, strict=True)
    }


# Average constraint violation rate over 5,000 rounds.
VIOLATION = _read(
    FORMS + LOGS,
    """
    master_slave 0.009 0.013 0.011 0.018 0.006 0.008 0.012 0.010
    pdwa 0.022 0.039 0.083 0.076 0.043 0.071 0.065 0.052
    pdg2anet 0.023 0.029 0.081 0.068 0.038 0.063 0.053 0.057
    wolpertinger 0.039 0.043 0.070 0.056 0.023 0.044 0.047 0.041
    cem_ppo 0.034 0.053 0.073 0.071 0.029 0.042 0.039 0.050
    gtkr 0.033 0.039 0.067 0.048 0.032 0.040 0.041 0.053
    rlfd 0.022 0.047 0.052 0.053 0.071 0.046 0.082 0.036
    csar_est1 0.026 0.040 0.049 0.051 0.067 0.049 0.077 0.038
    csar_est2 0.024 0.043 0.046 0.054 0.076 0.041 0.069 0.033
    """,
)

# Reward and violation rate without one of the samplers.
LEAVE_OUT_REWARD = _read(
    FORMS + LOGS,
    """
    all 0.1364 0.4308 0.5021 0.4877 0.7092 0.8125 0.4193 0.7646
    no_solver 0.1308 0.4189 0.4795 0.4638 0.6493 0.6922 0.3724 0.7038
    no_wolpertinger 0.1298 0.4201 0.4842 0.4785 0.6951 0.7539 0.3891 0.7202
    no_g2anet 0.1287 0.4248 0.4796 0.4761 0.6996 0.7713 0.3718 0.7319
    no_cem_ppo 0.1319 0.4261 0.4897 0.4619 0.6998 0.7804 0.3911 0.7336
    no_random_best 0.1249 0.4177 0.4641 0.4492 0.6344 0.5957 0.3897 0.6461
    no_teacher_student 0.1305 0.4261 0.4902 0.4775 0.6865 0.7613 0.3881 0.7268
    """,
)
LEAVE_OUT_VIOLATION = _read(
    FORMS + LOGS,
    """
    all 0.009 0.013 0.011 0.018 0.006 0.008 0.012 0.010
    no_solver 0.018 0.022 0.024 0.029 0.019 0.021 0.023 0.022
    no_wolpertinger 0.018 0.022 0.024 0.029 0.019 0.021 0.023 0.022
    no_g2anet 0.014 0.015 0.017 0.029 0.012 0.012 0.015 0.017
    no_cem_ppo 0.012 0.015 0.013 0.020 0.009 0.009 0.014 0.013
    no_random_best 0.018 0.022 0.024 0.029 0.019 0.021 0.023 0.022
    no_teacher_student 0.013 0.015 0.016 0.022 0.010 0.011 0.014 0.015
    """,
)

# Reward and violation rate by lam: the linear form, and Delicious.
LAM_LINEAR_REWARD = _read(
    LAMBDAS,
    """
    master_slave 0.1523 0.1479 0.1466 0.1364 0.1357 0.1129
    pdwa 0.1204 0.1172 0.1159 0.1098 0.1071 0.0917
    pdg2anet 0.1397 0.1324 0.1301 0.1259 0.1229 0.1094
    wolpertinger 0.1276 0.1218 0.1193 0.1103 0.1072 0.0995
    cem_ppo 0.1185 0.1127 0.1103 0.1009 0.0988 0.0901
    gtkr 0.1237 0.1159 0.1124 0.1082 0.1068 0.0992
    rlfd 0.1281 0.1198 0.1172 0.1121 0.1105 0.1027
    csar_est1 0.1143 0.1086 0.1063 0.0997 0.0969 0.0903
    csar_est2 0.1132 0.1063 0.1042 0.0998 0.0971 0.0906
    """,
)
LAM_LINEAR_VIOLATION = _read(
    LAMBDAS,
    """
    master_slave 0.021 0.015 0.013 0.009 0.008 0.004
    pdwa 0.036 0.029 0.027 0.022 0.021 0.017
    pdg2anet 0.039 0.033 0.029 0.023 0.021 0.018
    wolpertinger 0.056 0.049 0.048 0.039 0.037 0.031
    cem_ppo 0.049 0.044 0.042 0.034 0.031 0.025
    gtkr 0.048 0.042 0.039 0.033 0.031 0.023
    rlfd 0.037 0.029 0.028 0.022 0.020 0.017
    csar_est1 0.041 0.034 0.032 0.026 0.025 0.021
    csar_est2 0.040 0.032 0.031 0.024 0.022 0.019
    """,
)
LAM_DELICIOUS_REWARD = _read(
    LAMBDAS,
    """
    master_slave 0.7876 0.7422 0.7383 0.7092 0.7052 0.6447
    pdwa 0.3024 0.2871 0.2746 0.2496 0.2366 0.2005
    pdg2anet 0.2924 0.2681 0.2637 0.0032 0.1972 0.1336
    wolpertinger 0.2784 0.2495 0.2402 0.2093 0.1938 0.1699
    cem_ppo 0.1877 0.1591 0.1489 0.0891 0.1182 0.0821
    gtkr 0.2869 0.2428 0.2353 0.1912 0.1831 0.1575
    rlfd 0.3387 0.3095 0.2902 0.2497 0.2386 0.2097
    csar_est1 0.5896 0.5677 0.5601 0.5032 0.4892 0.4461
    csar_est2 0.5803 0.5415 0.5302 0.4997 0.4783 0.4296
    """,
)
LAM_DELICIOUS_VIOLATION = _read(
    LAMBDAS,
    """
    master_slave 0.017 0.011 0.009 0.006 0.005 0.004
    pdwa 0.054 0.049 0.048 0.043 0.040 0.031
    pdg2anet 0.052 0.046 0.044 0.038 0.036 0.028
    wolpertinger 0.035 0.029 0.028 0.023 0.022 0.015
    cem_ppo 0.043 0.036 0.034 0.029 0.028 0.022
    gtkr 0.045 0.040 0.039 0.032 0.029 0.021
    rlfd 0.078 0.075 0.074 0.071 0.066 0.059
    csar_est1 0.076 0.073 0.072 0.067 0.063 0.048
    csar_est2 0.082 0.080 0.079 0.076 0.071 0.054
    """,
)

# Reward with a single sampler.
SINGLE_REWARD = _read(
    FORMS + LOGS,
    """
    solver 0.1207 0.4235 0.4772 0.4593 0.6392 0.7029 0.3709 0.6381
    random_best 0.0879 0.3821 0.4721 0.4396 0.4491 0.5193 0.3193 0.4891
    g2anet 0.1192 0.4079 0.4508 0.4325 0.5529 0.6298 0.3285 0.5536
    cem_ppo 0.1264 0.4184 0.4631 0.4428 0.6031 0.6731 0.3518 0.5837
    wolpertinger 0.1187 0.4098 0.4599 0.4339 0.5893 0.6639 0.3329 0.5499
    """,
)

# Minutes of a run, and their deviation; names of single samplers begin with "only_".
MINUTES = _read(
    ("synthetic", "synthetic_sd", "logs", "logs_sd"),
    """
    only_solver 25.61 2.97 10.42 1.53
    only_random_best 4.92 0.61 2.05 0.26
    only_g2anet 51.04 3.89 21.46 2.86
    only_cem_ppo 27.42 2.72 12.38 1.64
    only_wolpertinger 20.04 1.96 9.34 1.72
    master_slave 70.28 5.06 37.95 3.85
    gtkr 21.47 2.01 11.83 1.68
    rlfd 52.41 3.81 23.08 2.76
    csar_est1 10.28 0.83 5.03 0.49
    csar_est2 10.46 0.85 5.29 0.51
    """,
)

# Users, items and rows of the logs.
LOG_SIZES = _read(
    ("lastfm", "delicious", "movielens", "yahoo"),
    """
    users 1892 1867 2113 290
    items 17632 69226 10197 20
    rows 186480 437594 47957 128960
    """,
)

# What the text says of the distance to the second best, in per cent.
GAIN_REWARD = _read(
    FORMS + LOGS,
    "gain 8.24 6.38 17.88 9.11 40.10 56.73 18.87 27.27",
)
GAIN_VIOLATION = _read(
    FORMS + LOGS,
    "gain 59.09 55.17 76.08 62.5 73.91 80.00 69.23 69.70",
)

# The rewards that are printed for lam = 5, gathered from the three tables.
REWARD = {
    ("master_slave", column): LEAVE_OUT_REWARD["all", column] for column in FORMS + LOGS
}
REWARD |= {
    (row, "linear"): v for (row, lam), v in LAM_LINEAR_REWARD.items() if lam == "5"
}
REWARD |= {
    (row, "delicious"): v
    for (row, lam), v in LAM_DELICIOUS_REWARD.items()
    if lam == "5"
}
