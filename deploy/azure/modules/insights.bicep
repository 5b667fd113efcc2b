// Application Insights, with the Log Analytics workspace that keeps its records. Azure ML makes no workspace without one
// (400, "Missing dependent resources in workspace json"), though its schema calls it optional. dtrain writes nothing to
// it, so it costs nothing; what Azure ML itself may write is limited by the cap of a day.
param name string
param location string

@description('Gigabytes that are taken in on one day at most; what comes after that is dropped, and costs nothing.')
@minValue(1)
param dailyGigabytes int

resource logs 'Microsoft.OperationalInsights/workspaces@2023-09-01' = {
  name: name
  location: location
  properties: {
    sku: {
      name: 'PerGB2018'
    }
    // 31 days are included in the price of a gigabyte; Application Insights keeps its own for 90 without a charge.
    retentionInDays: 31
    workspaceCapping: {
      dailyQuotaGb: dailyGigabytes
    }
    publicNetworkAccessForIngestion: 'Enabled'
    publicNetworkAccessForQuery: 'Disabled'
  }
}

resource insights 'Microsoft.Insights/components@2020-02-02' = {
  name: name
  location: location
  kind: 'web'
  properties: {
    Application_Type: 'web'
    WorkspaceResourceId: logs.id
    IngestionMode: 'LogAnalytics'
    publicNetworkAccessForIngestion: 'Enabled'
    publicNetworkAccessForQuery: 'Disabled'
  }
}

output id string = insights.id
