"""Bills of Azure ML in each schema, written by us after public examples. None is a real bill.

- Columns of Enterprise Agreements, dates, tags without braces: microsoft/finops-toolkit,
  src/powershell/Tests/Unit/assets/EA_ActualCost_Small.csv (2023-09), and finopsfoundation/focus_converters,
  sample-anonymous-ea-export-dataset.csv (2023-09), whose names of columns differ.
- Columns of customer agreements, in small and capital letters: the header that a public test says it has from the live
  Cost Details API of 2025-03-01; learn.microsoft.com, «Cost and usage details (MCA)».
- Columns of FOCUS 1.0 with Microsoft's extensions: microsoft/finops-toolkit, the list of columns of its hub queries;
  learn.microsoft.com/cloud-computing/finops/focus/metadata.
- The workspace as the resource, and PoolName or ComputeTargetName in AdditionalInfo: a public Power Query of a
  company's exports, which takes both. «<compute>_<guid>» as PoolName: reported by users. Microsoft documents neither.

Numbers, names and ids are ours.
"""

from __future__ import annotations

import csv
import io
import json
from typing import Any

SUBSCRIPTION = "3f2504e0-4f89-11d3-9a0c-0305e82c3301"
_GROUP = f"/subscriptions/{SUBSCRIPTION}/resourceGroups/ml-rg"
WORKSPACE = f"{_GROUP}/providers/Microsoft.MachineLearningServices/workspaces/train-ws"
ELSEWHERE = WORKSPACE.replace("train-ws", "other-ws")
GUID = "0b5cf8e2-8d5c-4b0e-9f57-5a1d2c3e4f60"
SIZE = "Standard_NC6s_v3"

EA = (
    "InvoiceSectionName,AccountName,AccountOwnerId,SubscriptionId,SubscriptionName,ResourceGroup,ResourceLocation,Date,"
    "ProductName,MeterCategory,MeterSubCategory,MeterId,MeterName,MeterRegion,UnitOfMeasure,Quantity,EffectivePrice,"
    "CostInBillingCurrency,CostCenter,ConsumedService,ResourceId,Tags,OfferId,AdditionalInfo,ServiceInfo1,ServiceInfo2,"
    "ResourceName,ReservationId,ReservationName,UnitPrice,ProductOrderId,ProductOrderName,Term,PublisherType,"
    "PublisherName,ChargeType,Frequency,PricingModel,AvailabilityZone,BillingAccountId,BillingAccountName,"
    "BillingCurrencyCode,BillingPeriodStartDate,BillingPeriodEndDate"
)
EA_ACTUAL = (
    "BillingAccountId,BillingAccountName,BillingPeriodStartDate,BillingPeriodEndDate,SubscriptionId,Date,Product,"
    "PartNumber,MeterId,ServiceFamily,MeterCategory,MeterSubCategory,MeterRegion,MeterName,Quantity,EffectivePrice,Cost,"
    "UnitPrice,BillingCurrency,ResourceLocation,AvailabilityZone,ConsumedService,ResourceId,ResourceName,ServiceInfo1,"
    "ServiceInfo2,AdditionalInfo,Tags,CostCenter,UnitOfMeasure,ResourceGroup,ChargeType,PricingModel"
)
MCA = (
    "invoiceId,billingAccountId,billingProfileId,costCenter,billingPeriodEndDate,billingPeriodStartDate,"
    "servicePeriodEndDate,servicePeriodStartDate,date,serviceFamily,consumedService,meterId,meterName,meterCategory,"
    "meterSubCategory,meterRegion,ProductId,ProductName,SubscriptionId,subscriptionName,resourceGroupName,ResourceId,"
    "resourceLocation,location,effectivePrice,quantity,unitOfMeasure,chargeType,billingCurrency,pricingCurrency,"
    "costInBillingCurrency,costInPricingCurrency,costInUsd,paygCostInBillingCurrency,paygCostInUsd,"
    "exchangeRatePricingToBilling,additionalInfo,tags,PayGPrice,pricingModel,unitPrice,provider"
)
FOCUS = (
    "BilledCost,BillingAccountId,BillingCurrency,BillingPeriodEnd,BillingPeriodStart,ChargeCategory,ChargeClass,"
    "ChargeDescription,ChargeFrequency,ChargePeriodEnd,ChargePeriodStart,ConsumedQuantity,ConsumedUnit,ContractedCost,"
    "EffectiveCost,ListCost,PricingCategory,PricingQuantity,PricingUnit,RegionId,ResourceId,ResourceName,ResourceType,"
    "ServiceCategory,ServiceName,SkuId,SubAccountId,Tags,x_BilledCostInUsd,x_EffectiveCostInUsd,x_PricingCurrency,"
    "x_PricingUnitDescription,x_ResourceGroupName,x_SkuDetails,x_SkuMeterCategory,x_SkuMeterName,x_SkuMeterSubcategory"
)
NAMES: dict[str, tuple[str, dict[str, str]]] = {
    "ea": (EA, {
        "day": "Date", "category": "MeterCategory", "meter": "MeterName", "quantity": "Quantity",
        "unit": "UnitOfMeasure",
        "cost": "CostInBillingCurrency", "currency": "BillingCurrencyCode", "resource": "ResourceId",
        "info": "AdditionalInfo", "tags": "Tags",
    }),
    "ea_actual": (EA_ACTUAL, {
        "day": "Date", "category": "MeterCategory", "meter": "MeterName", "quantity": "Quantity",
        "unit": "UnitOfMeasure",
        "cost": "Cost", "currency": "BillingCurrency", "resource": "ResourceId", "info": "AdditionalInfo",
        "tags": "Tags",
    }),
    "mca": (MCA, {
        "day": "date", "category": "meterCategory", "meter": "meterName", "quantity": "quantity",
        "unit": "unitOfMeasure",
        "cost": "costInBillingCurrency", "currency": "billingCurrency", "usd": "costInUsd", "resource": "ResourceId",
        "info": "additionalInfo", "tags": "tags",
    }),
    "focus": (FOCUS, {
        "day": "ChargePeriodStart", "category": "x_SkuMeterCategory", "meter": "x_SkuMeterName",
        "quantity": "ConsumedQuantity", "unit": "ConsumedUnit", "cost": "BilledCost", "currency": "BillingCurrency",
        "usd": "x_BilledCostInUsd", "resource": "ResourceId", "info": "x_SkuDetails", "tags": "Tags",
    }),
}  # fmt: skip
"""Schema → header, and the column of each fact."""


def fact(
    day: str = "2026-10-25", cost: float = 3.06, hours: float = 1.0, *, pool: str = f"dtrain-nc6_{GUID}",
    meter: str = "NC6s v3", category: str = "Virtual Machines", unit: str = "1 Hour", resource: str = WORKSPACE,
    size: str = SIZE, currency: str = "USD", usd: float | None = None, tags: str = "", pool_key: str = "PoolName",
) -> dict[str, Any]:  # fmt: skip
    """One row in no schema yet. ``pool``: "" for a row that names none."""
    info: dict[str, Any] = {"UsageType": "ComputeHR", "ServiceType": size, "VMName": None} if size else {}
    if pool:
        info |= {pool_key: pool, "PoolAllocationMode": "BatchService"}
    return {
        "day": day, "category": category, "meter": meter, "quantity": hours, "unit": unit, "cost": cost,
        "currency": currency, "usd": cost if usd is None else usd, "resource": resource, "info": info, "tags": tags,
    }  # fmt: skip


def bill(schema: str, facts: list[dict[str, Any]]) -> str:
    """The facts as an export in that schema."""
    header, names = NAMES[schema]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, header.split(","), restval="")
    writer.writeheader()
    for row in facts:
        cells = {names[key]: value for key, value in row.items() if key in names}
        writer.writerow(cells | _as_written(schema, row, names))
    return ("\ufeff" if schema != "ea_actual" else "") + buffer.getvalue()


def _as_written(schema: str, row: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Dates, units, information and tags as each schema writes them."""
    year, month, day = row["day"].split("-")
    info = json.dumps(row["info"], separators=(",", ":")) if row["info"] else ""
    tags, resource = row["tags"], row["resource"]
    if schema == "ea":
        return {names["day"]: f"{int(month)}/{int(day)}/{year}", names["info"]: info, names["tags"]: tags}
    if schema == "ea_actual":
        return {names["day"]: f"{month}/{day}/{year}", names["info"]: info, names["tags"]: tags}
    if schema == "mca":
        braced = f"{{{tags}}}" if tags else ""
        return {names["day"]: f"{month}/{day}/{year}", names["info"]: info, names["tags"]: braced,
                names["resource"]: resource.lower()}  # fmt: skip
    units = {"1 Hour": "Hours", "1 GB": "GB", "1/Month": "Units/Month"}
    return {names["day"]: f"{row['day']}T00:00:00Z", names["unit"]: units.get(row["unit"], row["unit"]),
            names["info"]: info, names["tags"]: f"{{{tags}}}" if tags else "{}",
            names["resource"]: resource.lower(), "ServiceName": "Azure Machine Learning"}  # fmt: skip
