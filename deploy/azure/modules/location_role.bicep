// A role that reads quotas, sizes and the state of long operations, which belong to a region of the subscription, and
// which resource providers are registered in it. Who deploys it needs to define and assign roles on the subscription.
targetScope = 'subscription'

param prefix string
param orchestratorPrincipalId string

resource readsLocations 'Microsoft.Authorization/roleDefinitions@2022-04-01' = {
  name: guid(subscription().id, prefix, 'dtrain reads locations')
  properties: {
    roleName: 'dtrain reads locations (${prefix})'
    description: 'Sizes, quotas and operations of Azure ML in a region, and which resource providers are registered'
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
          'Microsoft.Resources/subscriptions/providers/read'
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
