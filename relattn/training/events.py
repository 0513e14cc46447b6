"""TensorBoard events, written by the thread that asks for it.

A `SummaryWriter` hands them to a thread of its own. Where the disk is full that thread
ends, its queue fills up, and training waits for ever.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import RecordWriter
from tensorboardX.summary import scalar


class EventsFile:
    """A new file of events in a folder.

    Args:
        folder: Where it is made.
        start_step: TensorBoard forgets what earlier files say of later steps.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> events = EventsFile(folder, start_step=0)
        >>> events.add(3, {"train/loss": 0.5})
        >>> events.close()
        >>> [path.name[:19] for path in folder.iterdir()]
        ['events.out.tfevents']
    """

    def __init__(self, folder: Path, start_step: int):
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}"
        self._records = RecordWriter(str(folder / name))
        self._write(file_version="brain.Event:2")
        if start_step:
            restart = SessionLog(status=SessionLog.START)
            self._write(step=start_step + 1, session_log=restart)

    def add(self, step: int, values: dict[str, float]) -> None:
        """Writes scalars.

        Args:
            step: Number of updates so far.
            values: By tag.
        """
        for tag, value in values.items():
            self._write(step=step, summary=scalar(tag, value))
        self._records.flush()

    def _write(self, **event: Any) -> None:
        event = Event(wall_time=time.time(), **event)
        self._records.write(event.SerializeToString())

    def close(self) -> None:
        """Writes what is left; closes the file even where that fails."""
        self._records.close()
