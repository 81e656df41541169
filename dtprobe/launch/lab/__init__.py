"""The lab VM: a stock Debian kernel under QEMU's software emulation, for what the host's kernel lacks (RDMA, NFS, netem, ...).

As a call, for any program:

    from dtprobe.launch import lab
    ended = lab.run(
        lab.Job(argv=("python3", "probe.py", "--fast"), cwd="/recipe", timeout_s=60, shares=(lab.Share(HERE, "/recipe"),)),
        out=Path("artifacts"),
        environ=os.environ,
    )
    ended.exit_code, ended.boot_s, (ended.out / "stdout.log").read_text()

As the program of an Arm: a file `vm.py` in the scenario's folder which is `sys.exit(lab.worker(...))`. The worker beside it then runs in the
VM under the VM's Python 3.11 with the standard library and `dtprobe` (`record`, `attempt`); what it says comes back into the
rank's folder, below `vm/`, where the readers find it.

Inside: root, no network device but `lo`, `/job` is `out` (writable, where the program's stdout.log, stderr.log and files belong), each Share where
it asks to be (read-only unless it says otherwise), `/harness` has dtprobe. `modprobe` loads what `recipe.MODULES` keeps. The disk may be written to; nothing of that is kept.

The image is built once (`image.ensure`; a minute, root, a Debian mirror) into `$XDG_CACHE_HOME/dtprobe/lab`; before the
first run by `python -m dtprobe.launch.lab build`. The VM ends with its job, at `timeout_s`, and with the process that started it,
whatever death that dies.
"""

from __future__ import annotations

from dtprobe.launch.lab.image import Image, ensure
from dtprobe.launch.lab.vm import Ended, Job, Share, run, worker

__all__ = ["Ended", "Image", "Job", "Share", "ensure", "run", "worker"]
