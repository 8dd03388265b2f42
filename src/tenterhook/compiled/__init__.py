"""Sessions inside compiled graphs: the code that ``torch.compile`` traces instead of the engine's dispatch.

- ``engine_api``: the functions that the engine calls.
- ``entry_points``: modules at which compiled code begins.
- ``trace_plan``, ``trace``, ``inner_values``: the code that Dynamo traces at a touched module.
- ``graph_outputs``, ``packed_outputs``: how recorded values leave a graph without a graph break.
- ``traced_gradients``, ``expected_gradients``, ``opaque_edits``: operations that run inside a graph.
- ``serve_spec``, ``served_calls``: calls that a replay serves.
- ``fullgraph_check``, ``explain_errors``: errors about compiled models.
- ``traced_features``: ``th.features`` inside a graph.
"""
