-- Runs once, on an empty volume: MLflow's database is POSTGRES_DB, this is Prefect's.
CREATE DATABASE prefect;
