"""Planning, installation, dispatch and removal of the actions of a session.

The engine depends on the :class:`~tenterhook.engine.action.Action` protocol only. It knows nothing about tapes or
edits.
"""
