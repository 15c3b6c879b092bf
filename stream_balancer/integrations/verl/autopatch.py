"""Importing this module calls ``patch()``: for settings that name a module, as VERL_USE_EXTERNAL_MODULES does."""

from stream_balancer.integrations.verl import patch

patch()
