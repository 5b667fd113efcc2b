// Quotas, sizes and the state of long operations are asked of a region, which belongs to the subscription. Only reading.
targetScope = 'subscription'

param prefix string
param orchestratorPrincipalId string

resource readsLocations 'Microsoft.Authorization/roleDefinitions@2022-04-01' = {
  name: guid(subscription().id, prefix, 'dtrain reads locations')
  properties: {
    roleName: 'dtrain reads locations (${prefix})'
    description: 'Sizes, quotas and operations of Azure ML in a region'
    type: 'CustomRole'
    assignableScopes: [
      subscription().id
    ]
    permissions: [
      {
        actions: [
          'Microsoft.MachineLearningServices/locations/computeoperationsstatus/read'
          'Microsoft.MachineLearningServices/locations/mfeOperationResults/read'
          'Microsoft.MachineLearningServices/locations/mfeOperationsStatus/read'
          'Microsoft.MachineLearningServices/locations/quotas/read'
          'Microsoft.MachineLearningServices/locations/usages/read'
          'Microsoft.MachineLearningServices/locations/vmsizes/read'
        ]
        notActions: []
        dataActions: []
        notDataActions: []
      }
    ]
  }
}

resource orchestratorReadsLocations 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  name: guid(subscription().id, orchestratorPrincipalId, readsLocations.id)
  properties: {
    principalId: orchestratorPrincipalId
    principalType: 'ServicePrincipal'
    roleDefinitionId: readsLocations.id
  }
}
