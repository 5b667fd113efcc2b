// The workspace. No compute: dtrain makes one when there is something to train, and the service ends it when it idles.
param name string
param location string
param storageId string
param vaultId string
param registryId string

resource workspace 'Microsoft.MachineLearningServices/workspaces@2024-10-01-preview' = {
  name: name
  location: location
  kind: 'Default'
  identity: {
    // Azure gives this identity what it needs on the resources beside it; that is why the resource group is dtrain's alone.
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
    publicNetworkAccess: 'Disabled'
    allowPublicAccessWhenBehindVnet: false
    // No account key is kept in the workspace: whoever reads or writes its storage does so by its own identity.
    systemDatastoresAuthMode: 'Identity'
    // Encrypts the nodes' scratch disks, and keeps diagnostic data down.
    hbiWorkspace: true
    v1LegacyMode: false
  }
}

output id string = workspace.id
output name string = workspace.name
