"""`make gpu-check`: what the first minutes on a machine with a GPU tell about this project.

    python3 -m tools.gpu_check --out results            every stage, within eight minutes
    python3 -m tools.gpu_check --stages lanes,adam      these alone
    python3 -m tools.gpu_check --simulate               tiny sizes, on the simulated accelerator
    python3 -m tools.gpu_check --list

docs/gpu.md says what they measure.

Every stage is a process of its own with a time limit, so that a crash, a hang or a lost GPU context
ends that stage and nothing else. The runner itself imports neither torch nor this project.
"""
