"""hpcserve: serves a language model from one or several nodes.

A *replica* is one copy of a model. Its *ranks* are processes on one or several nodes; each holds a *part* of the weights
(`split`). The ranks of one *stage* share each layer (tensor split); stages follow each other (pipeline split). The *leader*,
rank 0, runs the engine; the *front* speaks HTTP, keeps the tokens of each stream, and knows the ranks' roster.

Follow one request through the code:

1. the front reads it            api/, as OpenAI's API; tokens and chat templates: tokens.py, chat.py
2. it becomes a `GenerateRequest`  requests.py
3. the engine batches it         engine.py; batching.py chooses the rows of each step, within blocks of cache.py
4. a step runs on all ranks      steps.py is what the leader sends; group/ executes it by model.py, with sums over links
5. a token is chosen             sampling.py
6. it goes back as a `TokenEvent`  the front turns it into text, and sends it

Does not know the scheduler: a replica is started by its job. Rules: no pickle, no code from a model's directory.
"""
