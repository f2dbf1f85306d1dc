"""Finds the accelerators of this machine that can compute. `launch` runs it as a new process, since
a process keeps the devices that it has found.
"""

from __future__ import annotations

import json
import os

from megatron.core.device import kind_of
from megatron.core.drivers import driver_of


def main() -> None:
    """Prints the environment, as JSON, in which a process sees the usable devices alone; null on a
    machine without accelerators.
    """
    kind, found = kind_of(), None
    if kind != "cpu":
        driver = driver_of(kind)
        variable = driver.visible_devices
        visible = os.environ.get(variable) or ",".join(map(str, range(driver.device_count())))
        usable = [name for at, name in enumerate(visible.split(",")) if driver.is_usable(at)]
        found = {variable: ",".join(usable)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
