"""The story of a trial as it goes on, for whoever draws it twice a second: files each time, the scheduler rarely."""

from __future__ import annotations

import time
from dataclasses import replace

from hpc_rl.status.scheduler_view import Watcher
from hpc_rl.status.trial_status import Reader, Story
from hpc_rl.trial import Trial

DOUBT_S = 120.0  # so long a scheduler that gives no answer can put off an end that files only suggest


class Watch:
    """The story of now. An end that no file tells for certain is believed once the scheduler was asked after it showed."""

    def __init__(self, trial: Trial) -> None:
        self._reader = Reader(trial)
        self._watcher = Watcher(trial)
        self._doubt_at = 0.0  # Unix seconds; 0 for none
        self._shown: Story | None = None

    def look(self) -> Story:
        """The story of now."""
        answer = self._watcher.look(self._doubt_at)
        story = self._reader.read(answer.newest, answer.asked_at)
        if not story.over or is_certain(story):
            self._doubt_at, self._shown = 0.0, story
            return story
        self._doubt_at = self._doubt_at or time.time()  # the batch script may be about to start it again
        if answer.asked_at >= self._doubt_at or time.time() > self._doubt_at + DOUBT_S:
            return story
        return self._shown or replace(story, state="unknown", reason="the scheduler is being asked")


def is_certain(story: Story) -> bool:
    """Whether the files of a trial that seems over leave no room for its job to go on."""
    if story.state in ("done", "rendered") or (story.jobs and story.jobs[-1].over):
        return True
    return (
        story.state in ("failed", "cancelled")
        and bool(story.attempts)
        and story.attempts[-1].exit_code is not None
    )
