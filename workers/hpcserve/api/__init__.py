"""OpenAI's API for one model, over a `TokenEngine`.

Follow one request:

1. app.py       routes; `create_app` puts all together; errors as OpenAI's objects
2. guard.py     the body within bounds, API keys and their rates, the identifier of the request
3. schema.py    the requests as JSON Schema, which checks them; openapi.py describes the API by it
4. prompts.py   a checked request becomes `GenerateRequest`s, one for each choice
5. choices.py   the engine's tokens become text: stop strings, log probabilities, tool calls (tools.py)
6. answers.py   choices become the objects of the API, whole or as server-sent events
7. resumption.py  a stream that another replica began is continued

Knows neither ranks nor the scheduler.

Sources: https://platform.openai.com/docs/api-reference
"""
