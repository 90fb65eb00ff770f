"""What goes wrong between the controller and a switch."""


class FabricError(Exception):
    """Base of every error of the fabric."""


class PortConflict(FabricError):
    """Two circuits want one port; the switch changed nothing."""


class NoSuchPort(FabricError):
    """A circuit names a port that the switch does not have; nothing was changed."""


class SwitchRefused(FabricError):
    """The switch answered, but not with the circuits it was asked for."""


class SwitchUnreachable(FabricError):
    """The switch did not answer: what it holds is unknown until it is read again."""
