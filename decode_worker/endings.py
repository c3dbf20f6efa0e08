"""How attempts end here that do not end with a token, as their gateways are told.

Called by the worker on the step thread. Ends nothing.
"""

from kvtransfer.errors import Overloaded, TicketRefused
from service.orders import AttemptKey, AttemptRefused
from service.reports import NOTHING_ALLOWED, EndCause, EndedReport

REFUSALS: dict[type[Exception], EndCause] = {
    AttemptRefused: EndCause.INVALID,
    TicketRefused: EndCause.TICKET_REFUSED,
    Overloaded: EndCause.EXHAUSTED,
}


def refused(key: AttemptKey, error: Exception) -> EndedReport:
    return EndedReport(key=key, cause=REFUSALS[type(error)], detail=str(error))


def cancelled(key: AttemptKey) -> EndedReport:
    return EndedReport(key=key, cause=EndCause.CANCELLED, detail="cancelled")


def failed(key: AttemptKey, detail: str) -> EndedReport:
    """The hand-off."""
    return EndedReport(key=key, cause=EndCause.TRANSFER_FAILED, detail=detail)


def stuck(key: AttemptKey) -> EndedReport:
    """No token was allowed."""
    return EndedReport(key=key, cause=EndCause.GUIDE_FAILED, detail=NOTHING_ALLOWED)


def given_back(key: AttemptKey, preemptions: int) -> EndedReport:
    """preemptions: how often that has happened to it."""
    detail = "its blocks were needed"
    return EndedReport(key=key, cause=EndCause.PREEMPTED, detail=detail, preemptions=preemptions)
