"""When the price file that the project trains on changes, train again (C5)."""

import dagster as dg

from dtrain_dagster.settings import Settings


def build_new_data_sensor(settings: Settings, job_name: str) -> dg.SensorDefinition:
    @dg.sensor(
        name="new_data",
        job_name=job_name,
        minimum_interval_seconds=300,
        default_status=dg.DefaultSensorStatus.STOPPED,  # retraining spends money: a person switches it on
        description="Retrains when the file of DTRAIN_PRICES has changed. Bundled prices never do.",
    )
    def new_data(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        from dtrain_dagster.data.sources import version_token

        token = version_token(settings.prices)
        if token is None:
            return dg.SensorResult(skip_reason=f"{settings.prices!r} is bundled and does not change")
        if token == context.cursor:
            return dg.SensorResult(skip_reason=f"{settings.prices} has not changed")
        if not context.cursor:
            return dg.SensorResult(skip_reason=f"{settings.prices} is watched from now on", cursor=token)
        return dg.SensorResult(run_requests=[dg.RunRequest(run_key=token)], cursor=token)

    return new_data
