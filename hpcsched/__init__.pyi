from hpcsched.client.aio import AsyncClient as AsyncClient
from hpcsched.client.blocking import Client as Client

__version__: str
