"""The database: SQLAlchemy Core and SQL live here and nowhere else.

One SQLite file, written by one controller. Events and the rows that they changed go in together, in one transaction
that is on disk (WAL, ``synchronous=FULL``) before anybody is answered.
"""
