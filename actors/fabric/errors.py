"""What goes wrong between the controller and a switch. Each says whether the switch may have changed."""


class FabricError(Exception):
    """Base of every error of the fabric."""


class PortConflict(FabricError):
    """A port is used twice, in a plan or by what the switch already has; the switch changed nothing."""


class NoSuchPort(FabricError):
    """A circuit names a port that the switch does not have; nothing was changed."""


class SwitchRefused(FabricError):
    """The switch answered no, by status or inside a 200; what it holds must be read."""


class BadCredentials(FabricError):
    """The switch does not accept our user and password, or a file of the section that proves us or the switch can't be read; nothing was changed."""


class PartlyApplied(FabricError):
    """The switch acknowledged fewer changes than it was asked for; what it holds must be read."""


class BadAnswer(FabricError):
    """The switch answered something that is not its dialect; what it holds must be read."""


class SwitchUnreachable(FabricError):
    """The switch can't be reached. A change that was under way may or may not have taken effect."""


class SwitchTimedOut(SwitchUnreachable):
    """The switch did not answer in time. A change that was asked for may or may not have taken effect."""


class NotTuned(FabricError):
    """The switch acknowledged the circuits, but they did not carry light in time."""


class NotTheWriter(FabricError):
    """Another controller holds the lease of this switch; nothing was changed."""
