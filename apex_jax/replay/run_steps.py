"""The environment steps of a run, as its replay server counts them."""

from __future__ import annotations

from apex_jax.types import MAX_ENVIRONMENT_STEPS


class RunSteps:
    """Steps of all actors since the run began: those that came here, and those that only its learner knows of."""

    def __init__(self) -> None:
        self.here = 0  # behind the segments stored or refused, also by the servers whose journal this one goes on with
        self.earlier: int | None = None  # None until a learner has said what it knows
        self._is_restored = False  # and has yet to hear from a learner

    @property
    def total(self) -> int:
        """All of them; what peers say may be anything, and must not end the server."""
        return min((self.earlier or 0) + self.here, MAX_ENVIRONMENT_STEPS)

    def restore(self, here: int, earlier: int | None) -> None:
        """Goes on from what a journal holds."""
        self.here, self.earlier, self._is_restored = here, earlier, earlier is not None

    def on_learner(self, known: int) -> bool:
        """Takes the steps of the run that a learner knows of as it joins; returns whether some are new here."""
        before = self.earlier
        if self.earlier is None:  # what later learners know they have from this server, ...
            self.earlier = known
        elif self._is_restored:  # ... unless what was restored is older than what the learner knows
            self.earlier += max(0, known - self.total)
        self._is_restored = False
        return self.earlier != before
