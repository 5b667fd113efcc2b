// A storage account without keys: access by identities only, over TLS 1.2 only. The internet is refused; who comes in are
// private endpoints, and, where the workspace needs that, Azure's own services with a role (`bypass`).
@maxLength(24)
param name string
param location string

@description('Copies in three zones of the region (ZRS), or in one place (LRS) where the region has no zones.')
@allowed([
  'Standard_LRS'
  'Standard_ZRS'
])
param sku string

@description('Whether it is the workspace that uses it. The service then has to reach it from outside the network while it makes the workspace, which fails where public access is switched off as a whole.')
param ofWorkspace bool

@description('Name of a container to create; empty: none.')
param containerName string
param retentionDays int

@description('Keep overwritten blobs: checkpoints, manifests, datasets.')
param versioning bool

resource account 'Microsoft.Storage/storageAccounts@2023-05-01' = {
  name: name
  location: location
  kind: 'StorageV2'
  sku: {
    name: sku
  }
  properties: {
    accessTier: 'Hot'
    allowBlobPublicAccess: false
    allowCrossTenantReplication: false
    allowSharedKeyAccess: false
    defaultToOAuthAuthentication: true
    minimumTlsVersion: 'TLS1_2'
    publicNetworkAccess: ofWorkspace ? 'Enabled' : 'Disabled'
    supportsHttpsTrafficOnly: true
    encryption: {
      keySource: 'Microsoft.Storage'
      requireInfrastructureEncryption: true
      services: {
        blob: {
          enabled: true
        }
        file: {
          enabled: true
        }
      }
    }
    networkAcls: {
      bypass: 'AzureServices'
      defaultAction: 'Deny'
    }
  }
}

resource blobs 'Microsoft.Storage/storageAccounts/blobServices@2023-05-01' = {
  parent: account
  name: 'default'
  properties: {
    isVersioningEnabled: versioning
    deleteRetentionPolicy: {
      enabled: true
      days: retentionDays
    }
    containerDeleteRetentionPolicy: {
      enabled: true
      days: retentionDays
    }
  }
}

resource container 'Microsoft.Storage/storageAccounts/blobServices/containers@2023-05-01' = if (!empty(containerName)) {
  parent: blobs
  name: empty(containerName) ? 'unused' : containerName
  properties: {
    publicAccess: 'None'
  }
}

// Old versions cost as much as new ones: they are deleted when the days of retention are over.
resource upkeep 'Microsoft.Storage/storageAccounts/managementPolicies@2023-05-01' = if (versioning) {
  parent: account
  name: 'default'
  dependsOn: [
    blobs
  ]
  properties: {
    policy: {
      rules: [
        {
          enabled: true
          name: 'old-versions'
          type: 'Lifecycle'
          definition: {
            filters: {
              blobTypes: [
                'blockBlob'
              ]
            }
            actions: {
              version: {
                delete: {
                  daysAfterCreationGreaterThan: retentionDays
                }
              }
            }
          }
        }
      ]
    }
  }
}

output id string = account.id
output name string = account.name
output blobUrl string = account.properties.primaryEndpoints.blob
