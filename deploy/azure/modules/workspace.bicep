// The workspace, without a compute: dtrain creates one for a training, and the service releases idle nodes.
param name string
param location string
param storageId string
param vaultId string
param registryId string
param insightsId string

resource workspace 'Microsoft.MachineLearningServices/workspaces@2024-10-01-preview' = {
  name: name
  location: location
  kind: 'Default'
  identity: {
    // Azure gives this identity roles on the resources beside it; therefore the resource group contains dtrain only.
    type: 'SystemAssigned'
  }
  sku: {
    name: 'Basic'
    tier: 'Basic'
  }
  properties: {
    friendlyName: name
    description: 'Distributed training by dtrain'
    storageAccount: storageId
    keyVault: vaultId
    containerRegistry: registryId
    applicationInsights: insightsId
    publicNetworkAccess: 'Disabled'
    allowPublicAccessWhenBehindVnet: false
    // The workspace stores no account key: its storage is read and written with the caller's own identity.
    systemDatastoresAuthMode: 'Identity'
    // Encrypts the nodes' scratch disks, and reduces diagnostic data.
    hbiWorkspace: true
    v1LegacyMode: false
  }
}

output id string = workspace.id
output name string = workspace.name
