"""``drk.assistant.capture()``: the recorder around code of your own, in a notebook or a script.

::

    from drk.assistant import capture

    with capture() as profile:
        for x, y in loader:
            train_step(x, y)
    print(profile.report.verdict)     # profile.text() gives the tables; the report is stored as by `drk profile`

Modules made before the block are watched too, but their constructors' arguments are not known then: their Tasks build
them as the file says (defaults, ``get_init_inputs``), or are left out. An exception in the block goes through; what was
seen until then is still reported.

Left out: two captures at once, and one inside another profiler's window.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from drk.assistant.errors import TargetError, UsageError
from drk.assistant.profile_hooks import ProfileRecorder, is_watched, watch
from drk.assistant.report_text import render_text

if TYPE_CHECKING:
    from drk.assistant.report import Report


class Captured:
    """What a ``with capture()`` block saw; filled when the block ends. ``path`` is where the report is stored."""

    def __init__(self) -> None:
        self._report: Report | None = None
        self.path: Path | None = None

    @property
    def report(self) -> Report:
        """The report.

        Raises:
            UsageError: the block has not ended, or called no module.
        """
        if self._report is None:
            raise UsageError("nothing is captured yet", help="read it after the with block, which must call a module")
        return self._report

    def text(self) -> str:
        """Return the tables that ``drk profile`` prints."""
        return render_text(self.report)


@contextlib.contextmanager
def capture(
    steps: int = 5,
    *,
    target: str | None = None,
    profiles_dir: Path | str | None = None,
    title: str = "notebook",
    window_s: float = 60.0,
) -> Iterator[Captured]:
    """Watch every module that the block calls; the first ``steps`` + 2 steps run under torch.profiler.

    Args:
        steps: steps that are measured, after two of warm-up.
        target: a GPU for estimates where nothing runs on one (``h100``, ``sm_90``).
        profiles_dir: where the report goes, ``.drk/profiles`` in the current folder by default.
        title: goes into the report's id.
        window_s: longest time of the profiler's window.

    Raises:
        UsageError: another capture is running in this process.
        TargetError: the block called no module.
    """
    import torch

    from drk.assistant.profile_run import Wanted, finish_block
    from drk.assistant.report_store import default_profiles_dir

    if is_watched(torch.nn.Module):
        raise UsageError("another capture is running in this process")
    captured = Captured()
    place = Path(profiles_dir) if profiles_dir is not None else default_profiles_dir()
    with tempfile.TemporaryDirectory(prefix="drk-capture-") as name:
        folder = Path(name)
        quiet = "KINETO_LOG_LEVEL" not in os.environ
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its start and stop messages would stand in the notebook
        recorder = ProfileRecorder(folder, steps + 2, window_s)
        restore = watch(torch.nn.Module, recorder)
        try:
            yield captured
        finally:
            restore()
            recorder.finish()
            if quiet:
                del os.environ["KINETO_LOG_LEVEL"]
            broken = sys.exc_info()[0] is not None
            if recorder.all_entries:
                wanted = Wanted(place, steps, target)
                captured._report, captured.path = finish_block(folder, wanted, title, crashed=broken)
        if captured.path is None:
            raise TargetError("the block called no torch.nn.Module", kind="capture")
