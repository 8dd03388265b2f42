"""Sessions inside compiled graphs: what ``torch.compile`` traces in place of the engine, and how values come out.

``trace`` is what Dynamo sees where a session has touched a module, ``inside`` the same for places inside a forward,
``graph outputs`` how values leave a graph that has no breaks, ``gradient`` and ``opaque`` the operations that run in a
graph, ``entry`` where compiled code begins, ``report`` what a session tells of it all, ``taking`` what ``th.features``
does in a graph.
"""
