"""Services that are composed of Dishka providers and run in one process."""

from integr8s_idem.runtime.containers import make_container
from integr8s_idem.runtime.outbox_relay import relay_outbox
from integr8s_idem.runtime.service import Background, Platform, Service
from integr8s_idem.runtime.service_group import ServiceGroup, run_services

__all__ = ["Background", "Platform", "Service", "ServiceGroup", "make_container", "relay_outbox", "run_services"]
