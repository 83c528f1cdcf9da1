"""The engines that serve models: how each is installed, started, asked and understood. Pure, and open to plug-ins.

``words`` has what an engine has to answer (``Engine``), ``registry`` finds engines by name through the entry-point
group ``reconcile.engines``. Sources of facts stand beside them, as the package version whose code was read or run.
"""
