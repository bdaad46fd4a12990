"""Authors of statements: whose word a statement is, and whether that node is a member now."""

from collections import OrderedDict
from collections.abc import Callable

from decod.ids import NodeId
from decod.membership.credential import Credential, Statement
from decod.wire import validate

_REMEMBERED_MAX = 4096


def everybody(_: NodeId) -> bool:
    """Allow each node."""
    return True


class Authors:
    """Checks whose word statements are. It remembers true credentials, since a check is dear.

    Args:
        root: The root's public key.
        clock: Returns seconds of the Unix epoch.
        allowed: Whether a member may still speak; a banned one may not.
    """

    def __init__(
        self,
        root: bytes,
        clock: Callable[[], float],
        allowed: Callable[[NodeId], bool] = everybody,
    ) -> None:
        self._root, self._clock, self._allowed = root, clock, allowed
        self._true: OrderedDict[Credential, None] = OrderedDict()
        """Credentials that follow from the root, the one that was used last at the end."""

    def allows(self, node_id: NodeId) -> bool:
        """Whether a member may still speak."""
        return self._allowed(node_id)

    def author_of(self, statement: Statement, kind: str) -> Credential:
        """Return the credential of the member who made a statement.

        Raises:
            MalformedMessageError: The statement is of another kind, or no present member's.
        """
        credential = statement.credential
        node_id = credential.node_id
        if not self._allowed(node_id):
            raise validate.malformed("statement.author", node_id, allowed="no banned node")
        if credential not in self._true:
            credential.check(self._root, None)
            self._true[credential] = None
            if len(self._true) > _REMEMBERED_MAX:
                self._true.popitem(last=False)
        self._true.move_to_end(credential)
        statement.check_signature(self._root, kind, now_s=self._clock())
        return credential
