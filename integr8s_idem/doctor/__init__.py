"""What may be wrong with a set-up, found before it loses anything: `integr8s-idem doctor`."""

from integr8s_idem.doctor.examination import Asked, examined
from integr8s_idem.doctor.report import STATUS, as_json, as_text, status_of

__all__ = ["STATUS", "Asked", "as_json", "as_text", "examined", "status_of"]
