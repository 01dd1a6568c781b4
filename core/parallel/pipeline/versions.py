"""Versions of a stage's parameters, by the number of the step that computes with them.

A version is a set of parameters of its own (`Replicas.replace_parameters`). The model reads them once they are put in
their places; the graph of a forward holds those that it was made of; and none is written once it has been read. So a
version costs its memory and no copy, and goes when the last backward that needs it is over.
"""

from torch import nn

Version = dict[str, nn.Parameter]


class Ring:
    """Versions of some of a model's parameters: step t computes with what max(t - delay, 0) updates have made.

    places  name -> all names of the parameter in the model
    delay   updates that a step's version is old
    newest  what the last update has made
    """

    def __init__(self, model: nn.Module, places: dict[str, list[str]], delay: int):
        self.places, self.delay = places, delay
        # Looked up once: actions of different steps take turns.
        split = {name: [place.rpartition(".") for place in of] for name, of in places.items()}
        self._slots = [(name, model.get_submodule(path), leaf) for name, of in split.items() for path, _, leaf in of]
        self.newest: Version = {}
        self._at: dict[int, Version] = {}
        self._next = 0  # the first step that has no version yet
        self._installed: Version | None = None

    def start(self, version: Version) -> None:
        """Let the next steps compute with a version, as if there had been no update."""
        self.newest = {name: version[name] for name in self.places}
        self._at = dict.fromkeys(range(self.delay + 1), self.newest)
        self._next = self.delay + 1

    def put(self, updates: int, version: Version) -> None:
        """Note the version that so many updates have made."""
        step = updates + self.delay
        self.fill(updates - 1)
        self.newest = self._at[step] = {name: version[name] for name in self.places}
        self._next = max(self._next, step + 1)

    def fill(self, updates: int) -> None:
        """So many updates are over, and what is not noted of them was skipped: it has made what was there before."""
        for step in range(self._next, updates + self.delay + 1):
            self._at[step] = self.newest
            self._next = step + 1

    def drop(self, step: int) -> None:
        """The step's last backward is over."""
        del self._at[step]
        self.install(None)

    def install(self, step: int | None) -> None:
        """Let the model compute with the version of a step; None: with the newest."""
        self.show(self.newest if step is None else self._at[step])

    def show(self, version: Version) -> None:
        """Let the model compute with a version that no step need have."""
        if version is self._installed:
            return
        for name, module, leaf in self._slots:
            module.register_parameter(leaf, version[name])
        self._installed = version

    @property
    def needs_newest(self) -> bool:
        """Whether a step is to compute with the newest version, or its backward is to come."""
        return any(version is self.newest for version in self._at.values())

    def older(self, updates: int) -> dict[int, Version]:
        """age -> the version that so many updates less have made, of those that a step is still to compute with."""
        return {age: self._at[updates + self.delay - age] for age in range(1, self.delay + 1)}

    def replace(self, updates: int, age: int, version: Version) -> None:
        """Let the version of that age be other parameters of the same values."""
        self._at[updates + self.delay - age] = version
