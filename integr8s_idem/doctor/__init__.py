"""`integr8s-idem doctor`: check settings, store, brokers and topics for problems."""

from integr8s_idem.doctor.examination import Examination, examine
from integr8s_idem.doctor.report import STATUS, as_json, as_text, status_of

__all__ = ["STATUS", "Examination", "as_json", "as_text", "examine", "status_of"]
