"""The torch border: functions, registered operators, modules, model conversion."""
