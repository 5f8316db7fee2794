"""The database. SQLAlchemy is used only here.

It is one SQLite file with one writer, the controller. Events and the rows that they changed are
written in one transaction. The transaction is on disk (WAL, ``synchronous=FULL``) before any client
gets an answer. `rows` has the tables, `store` the statements, `engine` what only SQLite has.
"""
