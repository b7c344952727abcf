"""The gym as a service: an HTTP API, a queue on Redis (Celery) and one worker process per GPU (DESIGN 4.9).

Nothing is imported here: the API process never loads torch, the workers never load FastAPI. Needs the ``serve`` extra.
Left out: Redis Cluster (scripts build key names), and anything between machines but Redis and HTTP.
"""
